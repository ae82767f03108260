"""What a process of ours is to its machine and to whoever started it: its words, signals, ports, directories and children."""
