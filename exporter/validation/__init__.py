"""The proof: the same steps through two steppers, compared under tolerances that were measured."""
