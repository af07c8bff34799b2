//! What is saved and how it survives.
