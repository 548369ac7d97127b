"""Random images in the files of MNIST, and the command line of a tiny run on them."""

import gzip
import struct

import numpy as np

SHAPE = {"image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 16}
SMALL = {
    **{"num_hidden_layers": 1, "num_attention_heads": 2, **SHAPE},
    **{"noise_multiplier": 1, "target_delta": 1e-3, "accountant": "rdp", "projection_rank": 4},
    **{"max_steps": 2, "expected_batch_size": 8, "per_device_train_batch_size": 6},
    **{"learning_rate": 0.1, "max_grad_norm": 1.0, "disable_tqdm": True, "use_cpu": True},
    **{"dataloader_pin_memory": False, "per_device_eval_batch_size": 5},
}


def random_arrays(count, shape, seed):
    """Images (N, *shape) and labels (N,), both uint8."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, *shape), dtype=np.uint8)
    return images, random.integers(0, 10, count, dtype=np.uint8)


def both_splits(shape, counts=(6, 4)):
    """Arrays of a training and a test split."""
    names = ("train", "test")
    return {n: random_arrays(c, shape, seed=c) for n, c in zip(names, counts, strict=True)}


def write_idx(path, array):
    """Writes bytes as an IDX file, by its description."""
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    packed = gzip.compress if path.suffix == ".gz" else bytes
    path.write_bytes(packed(header + array.tobytes()))


def write_mnist(folder, arrays, ending=".gz"):
    for split, name in (("train", "train"), ("test", "t10k")):
        pixels, labels = arrays[split]
        write_idx(folder / f"{name}-images-idx3-ubyte{ending}", pixels)
        write_idx(folder / f"{name}-labels-idx1-ubyte{ending}", labels)


def words(folder, data, task="MNIST", **changes):
    """A command line; a value of None leaves an option out."""
    options = {
        **SMALL,
        **{"config": "paper", "task": task, "dataset_path": data},
        **{"output_dir": folder / "out", "result_dir": folder / "results", **changes},
    }
    return [f"--{name}={value}" for name, value in options.items() if value is not None]
