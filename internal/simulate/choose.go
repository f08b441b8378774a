package simulate

import (
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/weirlimit/weir/policy"
)

// Candidates returns the policies of a file to replay: those of the names, or all but those that cannot be, of which it warns.
func Candidates(file string, set *policy.Set, only []string, warnings io.Writer) ([]*policy.Policy, error) {
	var chosen []*policy.Policy
	if len(only) == 0 {
		for _, p := range set.Policies() {
			if p.Concurrency {
				fmt.Fprintf(warnings, "warning: policy %q is a concurrency limit and left out: traffic does not say when work ended\n", p.Name)
				continue
			}
			chosen = append(chosen, p)
		}
	}
	for _, name := range only {
		p, ok := set.Get(name)
		if !ok {
			return nil, fmt.Errorf("policy: there is no policy %q in %s", name, file)
		}
		chosen = append(chosen, p)
	}
	if len(chosen) == 0 {
		return nil, fmt.Errorf("policies: %s has no policy to replay", file)
	}
	return chosen, nil
}

// ParseShare reads callers=1% or requests=0.001.
func ParseShare(s string) (*Share, error) {
	if s == "" {
		return nil, nil
	}
	of, most, _ := strings.Cut(s, "=")
	share := &Share{}
	switch of {
	case "callers":
	case "requests":
		share.Of = Requests
	default:
		return nil, fmt.Errorf("suggest: %q is not like callers=1%% or requests=0.1%%", s)
	}
	number, percent := strings.CutSuffix(most, "%")
	v, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	if percent {
		v /= 100
	}
	if err != nil || !(v >= 0 && v <= 1) {
		return nil, fmt.Errorf("suggest: %q is not a share from 0%% to 100%%", most)
	}
	share.Most = v
	return share, nil
}
