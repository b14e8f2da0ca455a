"""What the checks cost and how well they predict."""
