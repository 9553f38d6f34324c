"""Models leave for, and arrive from, the tools people already use."""
