"""The models of the supported families, for SGLANG_EXTERNAL_MODEL_PACKAGE: SGLang then imports others only on demand.

It takes them from `EntryClass` of each module here. Without this it imports some 240 modules, one after the other.
"""
