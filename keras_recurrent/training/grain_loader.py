"""Adapter that turns a `DataLoader` of grain into a dataset of grain."""

import grain


class LoaderDataset(grain.IterDataset):
    """Dataset of the elements of a `grain.DataLoader`."""

    def __init__(self, loader):
        super().__init__()
        self._loader = loader

    def __iter__(self):
        return LoaderIterator(iter(self._loader))


class LoaderIterator(grain.DatasetIterator):
    """Iterator of one pass, with the state of the loader's iterator."""

    def __init__(self, iterator):
        super().__init__()
        self._iterator = iterator

    def __next__(self):
        return next(self._iterator)

    def get_state(self):
        return self._iterator.get_state()

    def set_state(self, state):
        self._iterator.set_state(state)
