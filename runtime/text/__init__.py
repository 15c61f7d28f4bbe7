"""From logits to text: the choice of a token, the generation loop, and text that is printed while it grows."""
