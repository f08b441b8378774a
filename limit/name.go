package limit

// MaxPolicyName is the longest name of a policy, in bytes.
const MaxPolicyName = 128

// InPolicyName says whether a character is allowed in a policy's name: A-Z a-z 0-9 . _ -
func InPolicyName(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' || r == '-'
}

// ValidPolicyName says whether name is a valid name of a policy: 1 to MaxPolicyName characters, each InPolicyName.
func ValidPolicyName(name string) bool {
	for _, r := range name {
		if !InPolicyName(r) {
			return false
		}
	}
	return name != "" && len(name) <= MaxPolicyName
}
