"""Images of data sets: where a record says they are, what a processor's config makes of them, how a file holds them."""
