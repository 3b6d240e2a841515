"""Communication between ranks: collectives, groups, experts, peer memory, random states."""
