"""Images as models see them: decoding, sizes, patches and positions, in NumPy and Pillow, for both interpreters."""
