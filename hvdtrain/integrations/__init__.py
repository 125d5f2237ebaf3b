"""hvdtrain on other engines: each module asks for its package when it is used."""
