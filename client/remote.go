package client

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/rpc/wire"
)

// This file has the nodes of a cluster answer checks. limiter.go has the steps before. The path of a call's checks:
//
//	CheckTo  takes the checks of a call; a check that a node did not carry out goes to another node
//	sendAll  makes one request for each node, of the checks whose keys the node owns, or for which pick returned the
//	         node (nodes.go)
//	send     queues a request at its node, whose writer makes messages of the queue (member.go)
//	answer   passes the node's answers to the requests (message.go)
//	await    waits for the end of a request, or until its caller's time is over
//
// It also turns the errors of gRPC calls into those of this package (statusError). Words are in member.go.
//
// Other files must keep: the error of a request is a gRPC status; a request whose caller has gone is not used again.

// Dial returns a Client of the cluster at address: the host:port of a node's gRPC listener, several of them separated
// by commas, or a target in gRPC's own syntax, such as "dns:///weir:8081" or "unix:/run/weir.sock". A single host name
// may stand for many nodes.
//
// The Client learns the ring from one of the nodes, and asks the node that owns a key. If the nodes do not send the
// ring, or the owner cannot be reached from here, says that it is not ready, or left a call unanswered a moment ago,
// the Client asks the node with the fewest checks in flight: any node can answer any check. The owners' addresses are
// those that the nodes advertise, with the port of their gRPC listener. The Client keeps a connection, with one stream,
// to each node that it has asked.
//
// Dial does not wait for a connection and does not fail if no node is at the address. While no node answers, the fail
// policy answers, from the first check on; by default it allows every check. The Client then logs a warning with the
// reason (WithLogger), Stats counts it, and every such Decision has FailedOpen or FailedClosed set. A program that
// should not start without nodes calls Ready first. If the nodes reject the credentials, every call returns
// ErrUnauthenticated or ErrDenied. ctx bounds the time that Dial itself waits; at present it waits for nothing. The
// errors of Dial are *Error of kind ErrInvalid, whose Field names the option or "address".
func Dial(ctx context.Context, address string, opts ...Option) (*Client, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	o, err := dialOptions(opts)
	if err != nil {
		return nil, err
	}
	a, err := parseAddress(address)
	if err != nil {
		return nil, err
	}
	if err := checkToken(&o, &a); err != nil {
		return nil, err
	}
	if o.tls != nil && o.tls.ServerName != "" {
		a.name = o.tls.ServerName
	}
	ns, err := newNodes(a, o)
	if err != nil {
		return nil, invalid("address", "%v", err)
	}
	c := newClient(ns, ns.close, o)
	c.nodes, c.loans, c.now = ns, ns.loans, ns.now
	c.counter, c.observer = new(Counter), o.observer
	return c, nil
}

// Prepare implements limit.Preparer. A cluster has no prepared handles.
func (ns *nodes) Prepare(*limit.Target, limit.Prepared) limit.Prepared { return nil }

// Check implements limit.Service.
func (ns *nodes) Check(ctx context.Context, checks []limit.Check) ([]Result, error) {
	results := make([]Result, len(checks))
	return results, ns.CheckTo(ctx, checks, nil, results)
}

// CheckTo implements limit.Preparer. It asks the owners of the keys in parallel, until ctx's Deadline or, without one,
// for the client's timeout. If a node does not carry out a check, it asks another one. The checks must be valid: an
// invalid one may stay without an answer.
func (ns *nodes) CheckTo(ctx context.Context, cs []limit.Check, _ limit.Denials, rs []Result) error {
	var one [1]int
	open := one[:0]
	for i := range cs {
		open = append(open, i)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if _, ok := ctx.Deadline(); !ok {
		ctx = deadline{ctx, time.Now().Add(ns.timeout)}
	}
	var room [1]*request
	for tries := 1; len(open) > 0; tries++ {
		sent, err := ns.sendAll(ctx, cs, open, room[:0])
		if err != nil {
			for _, i := range open {
				rs[i] = Result{Err: statusError(err)}
			}
			break
		}
		open = nil
		for _, f := range sent {
			err, untried := ns.await(ctx, f)
			for j, i := range f.places {
				switch {
				case err == nil:
					rs[i] = f.answers[j]
				case untried && tries < maxTries:
					open = append(open, i)
				default:
					rs[i] = Result{Err: statusError(err)}
				}
			}
			if err == nil && len(f.checks) == 1 {
				f.reset()
				ns.requests.Put(f)
			}
		}
	}
	return nil
}

// sendAll sends the checks at the places in open to their nodes, one request to each.
func (ns *nodes) sendAll(ctx context.Context, cs []limit.Check, open []int, requests []*request) ([]*request, error) {
	trace := traceOf(ctx)
	at, _ := ctx.Deadline()
	until := ns.now() + time.Until(at)
	for _, i := range open {
		m := ns.owners.Load().owner(&cs[i].Target)
		if m == nil {
			var err error
			if m, err = ns.pick(ctx); err != nil {
				return nil, err
			}
		}
		at := slices.IndexFunc(requests, func(f *request) bool { return f.to == m })
		if at < 0 {
			at = len(requests)
			f := ns.requests.Get().(*request)
			f.to, f.until, f.trace = m, until, trace
			requests = append(requests, f)
		}
		f := requests[at]
		f.places, f.checks, f.answers = append(f.places, i), append(f.checks, cs[i]), append(f.answers, Result{})
	}
	for _, f := range requests {
		f.to.outstanding.Add(int64(len(f.checks)))
		f.to.send(f)
	}
	return requests, nil
}

// await waits for the end of a request, and notes the outcome for its node. untried means that the node carried out
// nothing, so that another node may be asked.
func (ns *nodes) await(ctx context.Context, f *request) (err error, untried bool) {
	sent := ns.now()
	f.timer.Reset(f.until - sent)
	select {
	case <-f.done:
		err, untried = f.err, f.untried
	case <-f.timer.C:
		err = status.Error(codes.DeadlineExceeded, "no answer in time")
	case <-ctx.Done():
		err = status.FromContextError(ctx.Err()).Err()
	}
	f.timer.Stop()
	f.to.outstanding.Add(-int64(len(f.checks)))
	o := answered
	if err != nil {
		f.gone.Store(true)
		o = unknown // ended notes the end of the stream; heard notes a call that ran out of time
	}
	f.to.heard(ctx, err, o, ns.now()-sent)
	return err, untried
}

// statusError turns the error of a gRPC call into an error of this package.
func statusError(err error) error {
	if err == nil {
		return nil
	}
	s, _ := status.FromError(err)
	code, field, message := s.Code(), "", s.Message()
	switch {
	case overloaded(err):
		code = codes.Unavailable
	case code == codes.InvalidArgument, code == codes.NotFound, code == codes.ResourceExhausted:
		field, message = splitField(message)
	}
	return codeError(code, field, message)
}

// overloaded reports whether a node has rejected a call or a stream as a whole because it is overloaded. Then the node
// has read nothing of it. The error for a request that is too large has the same code, but it names a field, or is
// gRPC's own.
func overloaded(err error) bool {
	s, _ := status.FromError(err)
	if s.Code() != codes.ResourceExhausted {
		return false
	}
	field, message := splitField(s.Message())
	return field == "" && !strings.HasPrefix(message, "grpc: ")
}

// codeError turns a gRPC code with a message into an error of this package. A node's internal failure is
// ErrUnavailable, so that a caller does not fail because its limiter does. ErrDenied and ErrUnauthenticated stay as
// they are: they do not end by themselves, and the fail policy would hide them.
func codeError(code codes.Code, field, message string) error {
	kind := wire.Kind(code)
	switch code {
	case codes.DeadlineExceeded, codes.Canceled, codes.Aborted, codes.Internal, codes.Unknown:
		kind = ErrUnavailable
	}
	if kind == 0 {
		return fmt.Errorf("client: %w", status.Error(code, message))
	}
	return limit.NewError(kind, wire.FieldOf(field), message)
}

// splitField splits a message of weir.v1 that begins with a field's name, such as "checks[3].key: is empty". The
// messages of gRPC itself begin with "grpc: ".
func splitField(s string) (field, message string) {
	field, message, ok := strings.Cut(s, ": ")
	if !ok || field == "" || field == "grpc" || strings.Trim(field, "abcdefghijklmnopqrstuvwxyz0123456789_.[]") != "" {
		return "", s
	}
	return field, message
}
