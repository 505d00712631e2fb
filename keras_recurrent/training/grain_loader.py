"""A `DataLoader` of grain as one of grain's datasets, which it is not by itself."""

import grain


class LoaderDataset(grain.IterDataset):
    """What a `grain.DataLoader` yields."""

    def __init__(self, loader):
        super().__init__()
        self._loader = loader

    def __iter__(self):
        return LoaderIterator(iter(self._loader))


class LoaderIterator(grain.DatasetIterator):
    """One pass, whose place can be kept as that of a loader's own iterator."""

    def __init__(self, iterator):
        super().__init__()
        self._iterator = iterator

    def __next__(self):
        return next(self._iterator)

    def get_state(self):
        return self._iterator.get_state()

    def set_state(self, state):
        self._iterator.set_state(state)
