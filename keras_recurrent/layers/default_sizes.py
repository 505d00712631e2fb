"""Default sizes, computed from the width. Saved models depend on them."""

NUM_BLOCKS = 16  # De et al. 2024, arXiv:2402.19427
EXPAND_RATIO = 128  # Qin et al. 2024, arXiv:2404.07904


def default_num_blocks(width, multiple_of=1):
    """Returns the default number of blocks of gates on `width` channels.

    It is the paper's 16 if possible, else the largest smaller number with blocks of at least 4
    channels, else 1. The width of a block is a multiple of `multiple_of`.
    """
    if width % (NUM_BLOCKS * multiple_of) == 0:
        return NUM_BLOCKS
    for number in range(NUM_BLOCKS - 1, 1, -1):
        if width % (number * multiple_of) == 0 and width // number >= 4:
            return number
    return 1


def default_expand_ratio(width):
    """Returns the default head size of HGRN2: the largest divisor of `width` up to 128.

    Raises:
        ValueError: the head size would be below 8, and smaller than `width`.
    """
    ratio = max(n for n in range(1, EXPAND_RATIO + 1) if width % n == 0)
    if ratio < 8 and width > ratio:
        below = width // 64 * 64
        raise ValueError(
            "`expand_ratio`, the size of a head, must divide the width of the inputs. The largest "
            f"divisor of {width} up to {EXPAND_RATIO} is {ratio}, which is too small. Choose "
            f"another width, such as {below} or {below + 64}, or pass an `expand_ratio`."
        )
    return ratio
