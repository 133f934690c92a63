"""Every rule that a config, its model, its data and this machine must meet before a GPU is taken or a rank is started."""
