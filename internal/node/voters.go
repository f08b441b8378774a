package node

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/weirlimit/weir/cluster"
)

// ParseVoters returns the names in a list. A list of ordinals:N alone stands for the N lowest ordinals of the
// StatefulSet of the node name.
func ParseVoters(list []string, name string) ([]string, error) {
	if len(list) != 1 {
		return list, nil
	}
	count, ok := strings.CutPrefix(list[0], "ordinals:")
	if !ok {
		return list, nil
	}
	prefix := ordinal.FindStringSubmatch(name)
	if prefix == nil {
		return nil, fmt.Errorf("%s: name %s does not end in an ordinal, as weir-0 does: list the voters' names",
			list[0], name)
	}
	n, err := strconv.ParseUint(count, 10, 8)
	if err != nil || !IsVoterCount(int(n)) {
		return nil, fmt.Errorf("%s: the number of voters is 1, 3 or 5", list[0])
	}
	voters := make([]string, n)
	for i := range voters {
		voters[i] = prefix[1] + strconv.Itoa(i)
	}
	return voters, nil
}

// checkVoters returns what is wrong with the names of voters.
func checkVoters(voters []string) error {
	if len(voters) > 0 && !IsVoterCount(len(voters)) {
		return fmt.Errorf("%d voters are given: the number of voters is 1, 3 or 5", len(voters))
	}
	for i, v := range voters {
		if err := cluster.CheckName(v); err != nil {
			return err
		}
		if slices.Contains(voters[:i], v) {
			return fmt.Errorf("%q is given twice", v)
		}
	}
	return nil
}

// IsVoterCount reports whether a cluster can have n voters. An even number survives no more losses than one voter
// fewer.
func IsVoterCount(n int) bool { return n == 1 || n == 3 || n == 5 }

// ordinal matches a pod's name: the ordinal, which a StatefulSet puts after the last hyphen, and the text before it.
var ordinal = regexp.MustCompile(`^(.+-)(0|[1-9][0-9]{0,8})$`)
