"""The models of our families, for SGLANG_EXTERNAL_MODEL_PACKAGE: SGLang then imports others only if they are asked for.

It takes them from `EntryClass` of each module here. Without this it imports some 240 modules, one after the other.
"""
