"""What `loadtest recommend` is asked: its file, and the candidates in it."""
