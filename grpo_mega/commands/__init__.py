"""The commands of `grpo-mega`, each or two in a file. options.py defines their options; cli.py has the table of commands."""
