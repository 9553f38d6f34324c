"""What is masked, what is sampled, and what is lost: one function per objective."""
