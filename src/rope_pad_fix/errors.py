"""What cannot be done, said so that the reader knows what to do instead."""


class InputError(ValueError):
    """Something the caller can put right; the message is one line that says what, where, and how."""


class UnsupportedModelError(TypeError):
    """A model, or a setting of it, that a level cannot run; the message names a level that can."""


class UnsupportedCacheError(TypeError):
    """A cache that cannot be kept row by row; the message names a level that can use it."""
