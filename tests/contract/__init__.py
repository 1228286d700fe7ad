"""What every engine promises, held on each through one `engine` fixture. An engine that is added is one more entry."""
