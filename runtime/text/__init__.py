"""From logits to text: sampling, the generation loop, and text as it streams."""
