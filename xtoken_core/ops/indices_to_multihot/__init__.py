"""`indices_to_multihot`: a token's chosen experts, spread over all experts, and back."""
