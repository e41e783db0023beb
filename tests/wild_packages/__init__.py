"""Models of public packages, unchanged: entries by kind, and the check of their files."""
