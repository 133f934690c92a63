"""The commands of `grpo-mega`, one or two per file. options.py defines their options; cli.py has their table."""
