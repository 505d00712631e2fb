"""Which rows of a batch still write, on torch, without asking the device."""

import torch


class Rows:
    """Which rows still write.

    Args:
        room: int64 [B], how many tokens each row may write.
        stops: integers [S], the tokens at which a row stops.

    Attributes:
        active: boolean [B, 1], which rows still write.
    """

    def __init__(self, room, stops):
        self.room, self.stops = room.clone(), stops.clone()
        self.active = self.room[:, None] > 0

    def advance(self, token, chosen):
        """The next token [B, 1] of each row: the chosen one, or again the last of one that is done.

        It changes `room` and `active` in place, and may be a part of a CUDA graph.
        """
        token = torch.where(self.active, chosen, token)
        self.room.sub_(self.active[:, 0].to(self.room.dtype))
        goes_on = (self.room[:, None] > 0) & ~torch.isin(token, self.stops)
        self.active.logical_and_(goes_on)
        return token

    def copy(self):
        rows = Rows(self.room, self.stops)
        rows.active = self.active.clone()
        return rows

    def set(self, other):
        """Takes over the numbers of others, in place."""
        self.room.copy_(other.room)
        self.stops.copy_(other.stops)
        self.active.copy_(other.active)
