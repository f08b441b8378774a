package simulate

import (
	"context"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"sync"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/policy"
)

// suggest adds to every candidate the smallest limit that touches no more than the share, with the rest of the policy
// unchanged. It searches by bisection; each step replays the events that the intake has kept. A smaller limit never
// admits more in total, except for ties between callers. So the search may miss a smaller limit that happens to touch
// less than a larger one.
func suggest(ctx context.Context, cfg Config, in *intake, runs []*candidate, res *Result) error {
	var searching sync.WaitGroup
	for i, c := range runs {
		searching.Go(func() { res.Candidates[i].Suggestion = c.search(ctx, cfg.Suggest, in) })
	}
	searching.Wait()
	return ctx.Err()
}

// search returns the smallest limit, or why there is none.
func (c *candidate) search(ctx context.Context, share *Share, in *intake) *Suggestion {
	switch limits := c.policy.Limits; {
	case len(limits) != 1:
		return &Suggestion{Reason: "only a policy with one limit has a shape to be scaled"}
	case limits[0].Limit == algo.Unlimited:
		return &Suggestion{Reason: "the policy is unlimited"}
	case len(in.kept) == 0:
		return &Suggestion{Reason: "there is no traffic"}
	}
	// A limit as large as every key's whole traffic refuses only keys that no limit could admit.
	var most int64
	units := make([]int64, len(in.names))
	for _, e := range in.kept {
		units[e.key] += int64(e.cost)
		most = max(most, units[e.key])
	}
	own, scale := c.policy.Limits[0], 1.0
	if own.Capacity != 0 { // the bucket, which grows with the limit, has to hold that much
		scale = max(1, float64(own.Limit)/float64(own.Capacity))
	}
	low, high := int64(1), int64(min(math.Ceil(float64(max(most, 1))*scale), float64(algo.MaxLimit)))
	if own.Algorithm == algo.SlidingLog {
		high = min(high, max(algo.DefaultMaxLog, own.MaxLog))
	}
	best := c.probe(ctx, high, share, in)
	if best == nil {
		return &Suggestion{Reason: "even a limit that holds all traffic touches more: some keys are blocked, or have limits of their own"}
	}
	for low < high && ctx.Err() == nil {
		mid := low + (high-low)/2
		if s := c.probe(ctx, mid, share, in); s != nil {
			best, high = s, mid
		} else {
			low = mid + 1
		}
	}
	return best
}

// probe replays the kept events against a limit. It returns nil if the limit touches more than the share.
func (c *candidate) probe(ctx context.Context, limit int64, share *Share, in *intake) *Suggestion {
	p := newCandidate(c.policy)
	p.window = 0 // the fullest window is not needed
	p.from = in.from
	own := c.policy.Limits[0]
	scaled := own
	scaled.Limit = limit
	if own.Capacity != 0 {
		scaled.Capacity = int64(min(max(1, float64(own.Capacity)*float64(limit)/float64(own.Limit)),
			float64(algo.MaxLimit)))
	}
	if (algo.Limits{scaled}).Validate() != nil {
		return nil
	}
	// Overrides keep their limits, because operators have set them on purpose.
	p.scaled = map[*policy.Rule]algo.Limits{c.policy.Rules()[0]: {scaled}}
	for _, name := range in.names {
		p.meet(name)
	}
	count, most := &p.out.CallersTouched, int64(share.Most*float64(len(in.names)))
	if share.Requests {
		count, most = &p.out.Refused, int64(share.Most*float64(len(in.kept)))
	}
	for i, e := range in.kept {
		p.decide(&entry{e.at, int64(e.cost), e.key})
		if *count > most {
			return nil
		}
		if i%batchEvents == 0 && ctx.Err() != nil {
			return nil
		}
	}
	return &Suggestion{
		Limit:    limit,
		Callers:  float64(p.out.CallersTouched) / float64(len(in.names)),
		Requests: float64(p.out.Refused) / float64(len(in.kept)),
	}
}

// Candidates returns the policies of a file to replay: those named in only, or, if it is empty, all. It leaves
// concurrency limits out of all, and writes a warning for each.
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

// ParseShare parses callers=1% or requests=0.001. Empty: nil.
func ParseShare(s string) (*Share, error) {
	if s == "" {
		return nil, nil
	}
	of, most, _ := strings.Cut(s, "=")
	if of != "callers" && of != "requests" {
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
	return &Share{of == "requests", v}, nil
}
