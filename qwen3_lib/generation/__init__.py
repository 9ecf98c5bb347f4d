"""From token ids to an answer: options, processors, marks, guesses, and many answers together."""
