"""How ranks start, meet and stop, and how a rank that hangs is found and reported."""
