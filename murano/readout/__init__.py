"""What a row over the vocabulary is: reduced to the few numbers that were asked for."""
