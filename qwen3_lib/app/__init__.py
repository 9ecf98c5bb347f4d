"""What a person at a terminal touches: options, the command line, the chat, files, batch jobs."""
