"""What tests share: doubles, planted faults, and folder makers."""
