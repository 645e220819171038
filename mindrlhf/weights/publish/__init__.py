"""The weight boards of several nodes: what each lacks travels from a node that has it."""
