"""What models are for, beside generating text: a file for each task."""
