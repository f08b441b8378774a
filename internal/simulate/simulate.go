// Package simulate replays traffic against policies in virtual time, to show what a limit would have done before it is
// chosen. The algorithms are those of a node (package algo).
//
// The path of a replay: a Source (Log in input.go, Generator in generate.go) → intake numbers the keys and makes
// batches → each candidate (candidate.go) decides the batch, in parallel → Result → suggest (suggest.go) replays the
// kept events against other limits → Report (report.go).
//
// The traffic is replayed as it was; in reality callers retry, or stop, once a limit refuses them. Several nodes, lost
// owners and remembered refusals are not simulated. Concurrency limits are not replayed, because a log does not say
// when work ended.
package simulate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/policy"
)

// Event is one request of the traffic.
type Event struct {
	At   int64  // nanoseconds since 1970-01-01 UTC, or since the start of generated traffic
	Key  []byte // the key; valid until the next read
	Cost int64  // units; 0 peeks
}

// Source yields events. Read sets e and returns io.EOF after the last event. An event that is older than the one before
// counts as one of the same instant, as on a node, whose clock never runs backwards.
type Source interface {
	Read(e *Event) error
}

// Config configures a Run.
type Config struct {
	Source Source
	// Policies are the candidates; each has its own states. A policy with Concurrency is an error.
	Policies []*policy.Policy
	// Suggest, if set, asks for the smallest limit of each policy that touches no more than this share. The events are
	// kept in memory for that, 16 bytes each.
	Suggest *Share
	// MaxEvents bounds the events that are kept for Suggest; 0 stands for DefaultMaxEvents.
	MaxEvents int
}

// DefaultMaxEvents is the most events that are kept for a suggestion: 16 bytes each, 640 MiB in all.
const DefaultMaxEvents = 40 << 20

// Share is a bound on what a limit may refuse.
type Share struct {
	Requests bool    // a share of the requests; otherwise of the callers: those that were refused at least once
	Most     float64 // 0 to 1
}

// Result is the result of a replay.
type Result struct {
	Events     int64     `json:"events"`
	Keys       int       `json:"keys"`
	Units      int64     `json:"units"`        // offered
	OutOfOrder int64     `json:"out_of_order"` // events older than the one before
	From       time.Time `json:"from"`
	To         time.Time `json:"to"`
	// BinWidth is the length of each element of the Timelines. The first one begins at From.
	BinWidth   time.Duration `json:"bin_width_ns"`
	Candidates []Candidate   `json:"candidates"`
}

// Candidate is what one policy would have done.
type Candidate struct {
	Policy    string `json:"policy"`
	Algorithm string `json:"algorithm"`
	Limits    string `json:"limits"` // such as "100 per 1m0s"

	Admitted      int64 `json:"admitted"` // requests; partial grants are not simulated
	Refused       int64 `json:"refused"`
	AdmittedUnits int64 `json:"admitted_units"`
	RefusedUnits  int64 `json:"refused_units"`
	// Impossible is how many of Refused could never pass: their cost is above the limit, or the key is blocked.
	Impossible int64 `json:"impossible"`

	// Worst is the largest number of units admitted to one key in any half-open interval of the length of the policy's
	// first window.
	Worst Worst `json:"worst"`

	CallersTouched int64   `json:"callers_touched"` // keys refused at least once
	ShareTouched   float64 `json:"share_touched"`
	// LongestWait is the largest retry_after of a refusal that may pass later, or the largest delay of a leaky bucket.
	LongestWait time.Duration `json:"longest_wait_ns"`
	// StateBytes is the memory of the states at the end of the replay.
	StateBytes int64 `json:"state_bytes"`

	Timeline   []Bin        `json:"timeline"`
	MostDenied []KeyRefusal `json:"most_refused"` // at most 10, the most refused first

	Suggestion *Suggestion `json:"suggestion,omitempty"`
}

// Worst is the fullest window of a key.
type Worst struct {
	Units  int64         `json:"units"`
	Key    string        `json:"key"`
	End    time.Time     `json:"end"` // the last admission in the window
	Window time.Duration `json:"window_ns"`
	// Incomplete: the admissions of a window were too many to keep, and Units is a lower bound.
	Incomplete bool `json:"incomplete"`
}

// Bin is a part of the timeline, in requests.
type Bin struct {
	Admitted int64 `json:"admitted"`
	Refused  int64 `json:"refused"`
}

// KeyRefusal has the requests of a key by result.
type KeyRefusal struct {
	Key      string `json:"key"`
	Admitted int64  `json:"admitted"`
	Refused  int64  `json:"refused"`
}

// Suggestion is the smallest limit that keeps to a Share, with the rest of the policy unchanged.
type Suggestion struct {
	Limit int64 `json:"limit"`
	// Callers and Requests are the shares that this limit touches.
	Callers  float64 `json:"callers"`
	Requests float64 `json:"requests"`
	// Reason is why there is no suggestion; Limit is 0 then.
	Reason string `json:"reason,omitempty"`
}

// batchEvents is how many events a batch has.
const batchEvents = 8192

// entry is an event with its key numbered in order of appearance.
type entry struct {
	at   int64
	cost int64
	key  uint32
}

// batch is a part of the traffic. The candidates share it, and only read it.
type batch struct {
	entries []entry
	// fresh are the keys that are new in this batch, in the order of their numbers.
	fresh []string
	from  int64 // the instant of the first event
}

// Run replays the source. It returns the Source's error, ctx's error, or an error that names the policy that cannot be
// replayed.
func Run(ctx context.Context, cfg Config) (*Result, error) {
	if len(cfg.Policies) == 0 {
		return nil, errors.New("policies: give at least one policy to replay against")
	}
	runs := make([]*candidate, len(cfg.Policies))
	for i, p := range cfg.Policies {
		if p.Concurrency {
			return nil, fmt.Errorf("policy %q: is a concurrency limit, and traffic does not say when work ended",
				p.Name)
		}
		runs[i] = newCandidate(p)
	}
	in := intake{keys: make(map[string]uint32), keep: cfg.Suggest != nil, most: cmp.Or(cfg.MaxEvents, DefaultMaxEvents)}
	err := in.read(ctx, cfg, func(b *batch) {
		var deciding sync.WaitGroup
		for _, c := range runs {
			deciding.Go(func() { c.take(b) })
		}
		deciding.Wait()
	})
	if err != nil {
		return nil, err
	}
	res := &Result{
		Events: in.events, Keys: len(in.keys), Units: in.units, OutOfOrder: in.late,
		From: time.Unix(0, in.from).UTC(), To: time.Unix(0, in.last).UTC(),
	}
	if in.events == 0 {
		res.From, res.To = time.Time{}, time.Time{}
	}
	width := minBin
	for _, c := range runs {
		width = max(width, c.line.width)
	}
	res.BinWidth = time.Duration(width)
	for _, c := range runs {
		c.line.widen(width)
		res.Candidates = append(res.Candidates, c.result(in.names))
	}
	if cfg.Suggest != nil {
		return res, suggest(ctx, cfg, &in, runs, res)
	}
	return res, nil
}

// intake reads the source, numbers the keys and makes batches.
type intake struct {
	keys                map[string]uint32
	names               []string
	events, units, late int64
	from, last          int64

	keep bool
	most int
	kept []packed
}

// packed is an event that is kept for a suggestion.
type packed struct {
	at   int64
	key  uint32
	cost uint32
}

// read reads the source, and calls decide for each batch. It reuses the memory of the batch after that.
func (in *intake) read(ctx context.Context, cfg Config, decide func(*batch)) error {
	b := &batch{entries: make([]entry, 0, batchEvents)}
	var e Event
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		err := cfg.Source.Read(&e)
		if err != nil && err != io.EOF {
			return err
		}
		if err == nil {
			if err := in.add(b, &e); err != nil {
				return err
			}
		}
		if err == nil && len(b.entries) < batchEvents {
			continue
		}
		b.from = in.from
		decide(b)
		b.entries, b.fresh = b.entries[:0], nil
		if err == io.EOF {
			return nil
		}
	}
}

func (in *intake) add(b *batch, e *Event) error {
	id, known := in.keys[string(e.Key)]
	if !known {
		if len(in.names) == 1<<32-1 {
			return errors.New("key: there are more than 4294967295 different ones")
		}
		id = uint32(len(in.names))
		name := string(e.Key)
		in.keys[name] = id
		in.names = append(in.names, name)
		b.fresh = append(b.fresh, name)
	}
	if in.events == 0 {
		in.from, in.last = e.At, e.At
	}
	if e.At < in.last {
		in.late++
	}
	in.last = max(in.last, e.At)
	in.events++
	in.units += e.Cost
	b.entries = append(b.entries, entry{in.last - in.from, e.Cost, id})
	if in.keep && e.Cost > 0 { // a peek changes nothing
		if len(in.kept) >= in.most {
			return fmt.Errorf("suggest: the traffic has more than %d events: give a part of it", in.most)
		}
		if e.Cost > 1<<32-1 {
			return fmt.Errorf("suggest: a cost of %d is above 4294967295", e.Cost)
		}
		in.kept = append(in.kept, packed{in.last - in.from, id, uint32(e.Cost)})
	}
	return nil
}

// instant returns the virtual clock at an event. The wall clock, which calendar windows read, is the traffic's own.
func instant(at, from int64) algo.Instant { return algo.Instant{Mono: at, Wall: from + at} }
