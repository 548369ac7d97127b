"""The paper's experiments: its three families of models, and sweeps over them."""
