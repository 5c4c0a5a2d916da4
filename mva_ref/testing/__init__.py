"""What a test suite imports: strategies (what to draw) and assertions (what to say about it). Needs the `test` extra."""
