"""The paper's studies at any budget, and what a trained model has learnt, in pictures."""
