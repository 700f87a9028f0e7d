"""The checker of annotations that conftest.py hooks into our packages: beartype, ints as floats.

As for pyright, an int is a float where a float is asked for.
"""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
