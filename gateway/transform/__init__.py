"""`gateway batch`: files of rows through a model of this process, each row once, to be gone on with where it was broken off."""
