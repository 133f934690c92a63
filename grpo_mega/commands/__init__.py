"""The commands of `grpo-mega`, one file each. options.py defines their options; cli.py has the table of commands."""
