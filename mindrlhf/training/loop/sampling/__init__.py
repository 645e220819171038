"""When samples are made, and from which prompts."""
