// Package simulate replays traffic against policies in virtual time, to show what a limit would have done before it is
// chosen. The algorithms that decide are those of a node (package algo).
//
// What it does not promise: that traffic stays as it was once a limit refuses part of it (callers retry, or stop), and
// anything about several nodes, lost owners or remembered refusals. Concurrency limits are not replayed: a log does not say
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
	Key  []byte // what is limited; valid until the next read
	Cost int64  // units; 0 peeks
}

// Source yields events. Read fills in e and returns io.EOF after the last event. An event that is older than the one before
// counts as one of the same instant, as it would for a node, whose clock never steps back.
type Source interface {
	Read(e *Event) error
}

// Config says what to replay against what.
type Config struct {
	Source Source
	// Policies are the candidates, each with states of its own. Those of Concurrency are an error.
	Policies []*policy.Policy
	// Progress, when not nil, is called with the number of events read so far, some times a second at most.
	Progress func(events int64)
	// Suggest asks for the smallest limit of each policy that touches no more than the given share; nil: none. The events are
	// kept in memory for it, 16 bytes each.
	Suggest *Share
	// MaxEvents bounds what Suggest keeps; 0 stands for DefaultMaxEvents.
	MaxEvents int
}

// DefaultMaxEvents is the most events that a suggestion is worked out for: 16 bytes each, 640 MiB in all.
const DefaultMaxEvents = 40 << 20

// Share is a bound on what a limit may touch.
type Share struct {
	Requests bool    // of the requests; otherwise of the callers, of which those are touched that were refused at least once
	Most     float64 // 0 to 1
}

// Result is what a replay found.
type Result struct {
	Events     int64     `json:"events"`
	Keys       int       `json:"keys"`
	Units      int64     `json:"units"`        // offered
	OutOfOrder int64     `json:"out_of_order"` // events older than the one before
	From       time.Time `json:"from"`
	To         time.Time `json:"to"`
	// BinWidth is the length of each element of the Timelines, the first of which begins at From.
	BinWidth   time.Duration `json:"bin_width_ns"`
	Candidates []Candidate   `json:"candidates"`
}

// Candidate is what one policy would have done.
type Candidate struct {
	Policy    string `json:"policy"`
	Algorithm string `json:"algorithm"`
	Limits    string `json:"limits"` // as in "100 per 1m0s"

	Admitted      int64 `json:"admitted"` // requests; a partial grant is not asked for
	Refused       int64 `json:"refused"`
	AdmittedUnits int64 `json:"admitted_units"`
	RefusedUnits  int64 `json:"refused_units"`
	// Impossible is how many of the refused could never pass: their cost is above the limit, or the key is blocked.
	Impossible int64 `json:"impossible"`

	// Worst is the largest number of units admitted to one key in any half-open interval as long as the policy's first
	// window, and where it ended.
	Worst Worst `json:"worst"`

	CallersTouched int64   `json:"callers_touched"` // keys refused at least once
	ShareTouched   float64 `json:"share_touched"`
	// LongestWait is the largest retry_after of a refusal that can pass, or the largest delay of a leaky bucket.
	LongestWait time.Duration `json:"longest_wait_ns"`
	// StateBytes is the memory that the states take at the end of the replay.
	StateBytes int64 `json:"state_bytes"`

	Timeline   []Bin        `json:"timeline"`
	MostDenied []KeyRefusal `json:"most_refused"` // at most 10, the most refused first

	Suggestion *Suggestion `json:"suggestion,omitempty"`
}

// Worst is the fullest window of a key.
type Worst struct {
	Units  int64         `json:"units"`
	Key    string        `json:"key"`
	End    time.Time     `json:"end"` // the instant of the last admission in it
	Window time.Duration `json:"window_ns"`
	// Incomplete says that the admissions within one window were too many to be kept: Units is a lower bound.
	Incomplete bool `json:"incomplete"`
}

// Bin is a part of the timeline, in requests.
type Bin struct {
	Admitted int64 `json:"admitted"`
	Refused  int64 `json:"refused"`
}

// KeyRefusal is what a key was refused.
type KeyRefusal struct {
	Key      string `json:"key"`
	Admitted int64  `json:"admitted"`
	Refused  int64  `json:"refused"`
}

// Suggestion is the smallest limit of a policy's shape that stays within a Share.
type Suggestion struct {
	Limit int64 `json:"limit"`
	// Callers and Requests are the shares that this limit touches.
	Callers  float64 `json:"callers"`
	Requests float64 `json:"requests"`
	// Reason says why there is none; Limit is 0 then.
	Reason string `json:"reason,omitempty"`
}

// batchEvents is how many events go to the candidates at a time.
const batchEvents = 8192

// entry is an event with its key numbered in order of appearance.
type entry struct {
	at   int64
	cost int64
	key  uint32
}

// batch is shared by the candidates, which only read it.
type batch struct {
	entries []entry
	// fresh are the keys that appear first in this batch, in the order of their numbers.
	fresh []string
	from  int64 // of the traffic
}

// Run replays the source. It returns what a Source returns in place of an event, ctx's error, or an error that names the
// policy that cannot be replayed.
func Run(ctx context.Context, cfg Config) (*Result, error) {
	if len(cfg.Policies) == 0 {
		return nil, errors.New("policies: give at least one policy to replay against")
	}
	runs := make([]*candidate, len(cfg.Policies))
	for i, p := range cfg.Policies {
		if p.Concurrency {
			return nil, fmt.Errorf("policy %q: is a concurrency limit, and traffic does not say when work ended", p.Name)
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

// intake reads the source, numbers the keys and hands batches out.
type intake struct {
	keys                map[string]uint32
	names               []string
	events, units, late int64
	from, last          int64

	keep bool
	most int
	kept []packed
}

// packed is an event as a suggestion keeps it.
type packed struct {
	at   int64
	key  uint32
	cost uint32
}

// read reads the source, and calls decide with one batch after the other, whose memory is used again.
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
		if b.entries, b.fresh = b.entries[:0], nil; cfg.Progress != nil {
			cfg.Progress(in.events)
		}
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
	if in.keep {
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

// instant is the virtual clock at an event. Calendar windows read the wall clock, which is the traffic's own.
func instant(at, from int64) algo.Instant { return algo.Instant{Mono: at, Wall: from + at} }
