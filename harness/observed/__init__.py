"""What a recorded cell shows: its requests, and by subject what follows from them."""
