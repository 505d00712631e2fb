"""Sizes that follow from the width where the user gives none. Saved models rely on them."""

NUM_BLOCKS = 16  # De et al. 2024, arXiv:2402.19427
EXPAND_RATIO = 128  # Qin et al. 2024, arXiv:2404.07904


def default_num_blocks(width, multiple_of=1):
    """The blocks of gates that work on `width` channels, each of a multiple of `multiple_of`.

    The paper's 16 wherever that works; else the most below it that leave blocks of at least 4
    channels; else one.
    """
    if width % (NUM_BLOCKS * multiple_of) == 0:
        return NUM_BLOCKS
    for number in range(NUM_BLOCKS - 1, 1, -1):
        if width % (number * multiple_of) == 0 and width // number >= 4:
            return number
    return 1


def default_expand_ratio(width):
    """The size of HGRN2's heads: the largest divisor of `width` up to the paper's 128.

    Raises:
        ValueError: it is below 8, and one head would not be that small.
    """
    ratio = max(n for n in range(1, EXPAND_RATIO + 1) if width % n == 0)
    if ratio < 8 and width > ratio:
        below = width // 64 * 64
        raise ValueError(
            "`expand_ratio`, the size of a head, must divide the width of the inputs. The largest "
            f"divisor of {width} up to {EXPAND_RATIO} is {ratio}, which makes poor heads. Choose "
            f"another width, such as {below} or {below + 64}, or pass an `expand_ratio`."
        )
    return ratio
