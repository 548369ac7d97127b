"""The paper's experiments: its methods, its three families of models, and sweeps over them."""

from recipes.paper import methods

__all__ = ["methods"]
