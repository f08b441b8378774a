package node

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/gateway/console"
	httpapi "github.com/weirlimit/weir/gateway/http"
	"github.com/weirlimit/weir/internal/netaddr"
	"github.com/weirlimit/weir/internal/observe"
	"github.com/weirlimit/weir/internal/panics"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// Bounds of a page of the console.
const (
	consoleKeys     = 20
	consolePolicies = 100
	// perConsoleStream is the memory of a node for each stream of the console: a page with the longest keys takes a
	// megabyte while it is sent.
	perConsoleStream = 8 << 20
)

// openConsole makes the console, unless it is turned off.
func (n *Node) openConsole() error {
	if n.cfg.NoConsole {
		return nil
	}
	n.console = console.New(console.Config{
		Collect: n.collect, Logger: n.log, Caller: n.security.nameOf,
		Source:     netaddr.Resolver{Trusted: n.forwardAuth.TrustedProxies},
		MaxStreams: int(min(max(n.cfg.Memory.Limit/perConsoleStream, 4), console.DefaultMaxStreams)),
	})
	return nil
}

func (n *Node) consolePath() string {
	if n.console == nil {
		return ""
	}
	return console.Path
}

// consoleRoutes returns the routes of the console. The page itself needs no role, so that it can ask for a token.
func (n *Node) consoleRoutes() (list []httpapi.Route) {
	if n.console == nil {
		return nil
	}
	for _, path := range n.console.Paths() {
		list = append(list, httpapi.Route{Method: "GET", Path: path, Role: auth.RoleOpen,
			Handler: n.console.ServeAsset})
	}
	return append(list, httpapi.Route{Method: "GET", Path: console.Path + "/events", Role: auth.RoleRead,
		Handler: n.console.ServeEvents})
}

// snapshot is the data of the console at one moment.
type snapshot struct {
	n        *Node
	status   *weirv1.StatusResponse
	policies httpapi.PolicyListing
	activity *clusterActivity
}

// collect takes a snapshot for the console. It returns nil after a panic, which it recovers.
func (n *Node) collect(ctx context.Context) (s console.Snapshot) {
	panics.Tell(func(p *panics.Error) { n.panicked("http")("console", p) }, func() { s = n.look(ctx) })
	return s
}

// look takes a snapshot of the cluster.
func (n *Node) look(ctx context.Context) console.Snapshot {
	s := &snapshot{n: n, policies: n.listPolicies()}
	var asked panics.Group
	asked.Go(func() { s.status = n.Status(ctx) })
	s.activity = n.gather(ctx, &peerv1.ActivityRequest{Keys: maxTopKeys, Orders: []weirv1.KeyOrder{
		weirv1.KeyOrder_KEY_ORDER_BUSIEST, weirv1.KeyOrder_KEY_ORDER_REFUSED, weirv1.KeyOrder_KEY_ORDER_FULLEST,
	}})
	asked.Wait()
	return s
}

// page is the JSON of one event.
type page struct {
	Roles    []string       `json:"roles"`
	Status   jsontext.Value `json:"status"`
	Policies jsontext.Value `json:"policies"`
	History  history        `json:"history"`
	// Top has the JSON of GET /v1/keys/top, by order; absent for callers without the role keys.
	Top map[string]jsontext.Value `json:"top,omitempty"`
}

// history has the decisions of policies by step, the present step first.
type history struct {
	StepMS   int64                  `json:"step_ms"`
	AgeMS    int64                  `json:"age_ms"` // age of the end of the newest complete step
	Policies map[string][][6]uint64 `json:"policies"`
	// how many policies are not in Policies, because there are more than consolePolicies
	Left int `json:"left"`
}

// Render implements console.Snapshot.
func (s *snapshot) Render(ctx context.Context) (text []byte, ok bool) {
	roles := s.n.security.auth.Roles(ctx)
	if roles&auth.RoleRead == 0 {
		return nil, false
	}
	out := page{Roles: strings.Split(roles.String(), ","), History: s.history()}
	var err error
	if out.Status, err = httpapi.MarshalStatus(s.status); err != nil {
		return nil, false
	}
	if out.Policies, err = httpapi.MarshalPolicies(s.policies); err != nil {
		return nil, false
	}
	if roles&auth.RoleKeys != 0 {
		mayUse := s.n.security.auth.MayUse(ctx, auth.RoleKeys)
		out.Top = make(map[string]jsontext.Value)
		for i, name := range httpapi.KeyOrders()[1:] {
			order, rows := weirv1.KeyOrder(i+1), slices.Clone(s.activity.rows)
			observe.SortRows(rows, order)
			if out.Top[name], err = httpapi.MarshalTopKeys(order,
				s.n.topKeys(s.activity, rows, consoleKeys, "", mayUse)); err != nil {
				return nil, false
			}
		}
	}
	text, err = json.Marshal(&out, jsontext.AllowInvalidUTF8(true))
	return text, err == nil
}

func (s *snapshot) history() history {
	h := history{StepMS: int64(observe.HistoryStep / time.Millisecond), AgeMS: int64(s.activity.age / time.Millisecond),
		Policies: make(map[string][][6]uint64)}
	list := slices.Clone(s.activity.policies)
	if h.Left = max(len(list)-consolePolicies, 0); h.Left > 0 {
		slices.SortStableFunc(list, func(a, b *peerv1.PolicyHistory) int { return cmp.Compare(total(b), total(a)) })
		list = list[:consolePolicies]
	}
	for _, p := range list {
		steps := make([][6]uint64, len(p.Steps))
		for i, c := range p.Steps {
			steps[i] = [6]uint64{c.Allowed, c.Refused, c.Shadowed, c.FailedOpen, c.FailedClosed, c.Errors}
		}
		h.Policies[p.Policy] = steps
	}
	return h
}

func total(p *peerv1.PolicyHistory) (n uint64) {
	for _, s := range p.Steps {
		n += observe.Decisions(s)
	}
	return n
}
