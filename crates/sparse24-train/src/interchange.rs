//! Other people's weights.
