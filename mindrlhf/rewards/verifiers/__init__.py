"""The built-in verifiers, one file per theme; every module here is searched for ``@register``."""
