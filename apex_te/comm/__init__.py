"""Communication between ranks: collectives, groups, agreement, peer memory, random states."""
