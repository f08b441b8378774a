package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/experimental"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"

	grpcapi "github.com/weirlimit/weir/gateway/grpc"
	httpapi "github.com/weirlimit/weir/gateway/http"
	"github.com/weirlimit/weir/gateway/resp"
	"github.com/weirlimit/weir/internal/admission"
	"github.com/weirlimit/weir/internal/panics"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/rpc/peer"
	"github.com/weirlimit/weir/rpc/transport"
	"github.com/weirlimit/weir/rpc/wire"
)

// handshakeTimeout bounds the handshake of a connection: a server that stops waits for it, and gRPC's own bound is 2
// min.
const handshakeTimeout = 5 * time.Second

// serve starts a server on each listener that is open.
func (n *Node) serve() error {
	if n.listeners.peer != nil {
		n.servePeers()
	}
	var ends []func(context.Context) // of the servers of callers
	if n.listeners.grpc != nil {
		ends = append(ends, n.serveGRPC())
	}
	if n.listeners.http != nil {
		ends = append(ends, n.serveHTTP())
	}
	if n.listeners.resp != nil {
		ends = append(ends, n.serveRESP())
	}
	n.closing(func(ctx context.Context) {
		if n.console != nil {
			n.console.Close() // its streams would last until their browsers close them
		}
		var servers sync.WaitGroup // in parallel, so that no server uses up the time of another
		for _, end := range ends {
			servers.Go(func() { end(ctx) })
		}
		servers.Wait()
	})
	return nil
}

// servePeers serves other nodes. closePeers ends the server.
func (n *Node) servePeers() {
	calls := admission.NewCalls(admission.CallsConfig{
		FirstMessage: n.limits.FirstMessageTimeout, MaxAge: n.limits.streamAge(), Panicked: n.panicked("peer"),
	})
	n.peerServer = grpc.NewServer(append(slices.Concat(calls.Options(), n.limits.peerServer(n.cfg.Memory)),
		n.security.grpcServer("peer"),
		grpc.MaxRecvMsgSize(transport.MaxMessage), grpc.MaxSendMsgSize(transport.MaxMessage),
		grpc.WaitForHandlers(true),
		grpc.ConnectionTimeout(handshakeTimeout), grpc.ForceServerCodecV2(transport.Codec()),
		experimental.BufferPool(n.peerBuffers))...)
	services := calls.Registrar(n.peerServer)
	n.peerService = peer.NewServer(peer.ServerConfig{
		Config: n.transport(), Receiver: n.limiter, Inspect: n.inspect,
		Identify: n.identity,
		Activity: n.activity, Describe: n.describe,
		Panicked: func(p *panics.Error) { n.panicked("peer")("carrying out a batch", p) },
	})
	peerv1.RegisterPeerServer(services, n.peerService)
	peerv1.RegisterOwnershipServer(services, n.messenger)
	peerv1.RegisterGossipKeysServer(services, n.keys)
	peerv1.RegisterOverridesServer(services, n.overrides.replicator)
	n.work.Go(func() { n.served("peer", n.peerServer.Serve(n.listeners.peer)) })
}

// closePeers ends the streams to and from other nodes.
func (n *Node) closePeers(ctx context.Context) {
	if n.peerService != nil {
		n.peerService.Drain(ctx) // waits for the answers to operations that this node has forwarded for others
	}
	n.messenger.Close()
	n.peers.Close() // before the server, whose handlers may wait for what peers has sent
	if n.peerServer != nil {
		silent := n.listeners.peer.CloseSilent()
		n.peerServer.Stop() // streams between nodes do not end by themselves
		silent.Stop()
	}
}

// serveGRPC serves callers over gRPC, and returns the function that ends the server.
func (n *Node) serveGRPC() (end func(context.Context)) {
	callers := grpcapi.NewServer(grpcapi.ServerConfig{
		Service: n.security.auth.Service("grpc", n.limiter), Lender: n.security.auth.Lender("grpc", n.limiter),
		Caller: n.security.nameOf,
		Kept:   n.callersMemory, Status: n.Status, TopKeys: n.TopKeys, Topology: n.topology, Ready: n.readiness.Follow,
		Observe:      n.metrics.Streamed,
		WriteTimeout: n.limits.WriteTimeout, MaxUnread: n.limits.MaxUnread, Trace: n.traceStreamed(),
		Requests: n.requests,
		Panicked: n.panicked("grpc"),
	})
	calls := admission.NewCalls(admission.CallsConfig{
		Authorize: n.security.auth.GRPC, FirstMessage: n.limits.FirstMessageTimeout,
		MaxAge: n.limits.streamAge(), Ends: n.ctx, Ended: n.ended, Panicked: n.panicked("grpc"),
		MaxCalls: n.cfg.Memory.MaxCalls, Memory: n.callersMemory, StreamBytes: admission.PerStream,
		Caller: n.security.caller,
	})
	n.calls.Store(calls)
	codec := wire.ServerCodec(n.buffers, n.cfg.Memory.MaxParts)
	server := grpc.NewServer(append(slices.Concat(calls.Options(n.security.auth.Stream),
		n.limits.grpcServer(n.cfg.Memory)), n.security.grpcServer("grpc"),
		grpc.WaitForHandlers(true), grpc.NumStreamWorkers(streamWorkers), grpc.ConnectionTimeout(handshakeTimeout),
		grpc.ForceServerCodecV2(codec), experimental.BufferPool(n.buffers),
		// Callers may ping every 10 s, as the Go client does. gRPC would end their connections, because its own least
		// interval is 5 minutes.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second,
			PermitWithoutStream: true}),
		grpc.ChainStreamInterceptor(callers.EndUnread), n.traceUnary(),
	)...)
	n.grpcServer = server
	n.registerGRPC(calls.Registrar(server), callers)
	reflection.Register(server)
	n.work.Go(func() { n.served("grpc", server.Serve(n.listeners.grpc)) })
	return func(ctx context.Context) {
		defer n.listeners.grpc.CloseSilent().Stop()
		defer context.AfterFunc(ctx, server.Stop)()
		server.GracefulStop()
		callers.Close()
	}
}

// registerGRPC registers all services for callers.
func (n *Node) registerGRPC(services grpc.ServiceRegistrar, callers *grpcapi.Server) {
	callers.Register(services)
	others := grpcapi.Admitted(services, n.requests)
	weirv1.RegisterAdminServer(others, n.keys)
	n.overrides.service.Register(others)
	n.gubernatorService("grpc").Register(others)
	if s := n.envoyService("grpc"); s != nil {
		s.Register(others)
		n.quotaService(n.requests).Register(others)
	}
	healthv1.RegisterHealthServer(others, n.health)
	n.setHealth(false)
}

// serveHTTP serves callers over HTTP, and returns the function that ends the server.
func (n *Node) serveHTTP() (end func(context.Context)) {
	api := httpapi.New(httpapi.Config{
		Service: n.security.auth.Service("http", n.limiter), Authorize: n.security.authorizeHTTP,
		HasRole: n.security.auth.HasRole, Ready: n.Ready,
		Begin: n.security.beginHTTP,
		Host:  hostCheck(n.cfg.Bind, n.cfg.HTTPHosts), ForwardAuth: n.forwardAuth,
		Policies: n.listPolicies, Metrics: n.metrics.Handler(), Foreign: n.foreignRoutes(), Routes: n.consoleRoutes(),
		Console: n.consolePath(),
		Status:  n.Status,
		TopKeys: n.TopKeys, Describe: n.Describe, Overrides: n.overrides.service, NoInline: n.cfg.NoInline,
		Logger:  n.log,
		Problem: n.metrics.Problem, MaxBody: n.limits.MaxMessageSize, Requests: n.requests, Buffers: n.buffers,
	})
	server := n.limits.httpServer(httpapi.NewServer(n.observed(api), n.log))
	n.work.Go(func() { n.served("http", n.security.serveHTTP(server, n.listeners.http)) })
	return func(ctx context.Context) {
		defer n.listeners.http.CloseSilent().Stop()
		if err := server.Shutdown(ctx); err != nil {
			n.log.Warn("requests aborted", "error", err)
			_ = server.Close() // the log has said so
		}
	}
}

// serveRESP serves callers over the Redis protocol, and returns the function that ends the server.
func (n *Node) serveRESP() (end func(context.Context)) {
	server := resp.New(resp.Config{
		Service: n.security.auth.Service("resp", n.limiter), Authenticate: n.security.authenticateRESP,
		Current: n.security.current,
		Tokens:  n.security.access != nil, Caller: n.security.nameOf,
		Handshake: n.security.respHandshake(), IdleTimeout: max(n.limits.IdleTimeout, 0),
		CommandTimeout: n.limits.FirstMessageTimeout,
		Requests:       n.requests,
		Version:        n.cfg.Version, Decided: n.metrics.RESP, Failed: n.metrics.RESPFailed,
		Panicked: n.panicked("resp"),
		Suspicious: func(from net.Addr) {
			n.security.denials.note("resp", "http_on_resp_port", from, "HTTP where the Redis protocol is spoken")
		},
	})
	n.work.Go(func() { n.served("resp", server.Serve(n.listeners.resp)) })
	return func(ctx context.Context) {
		_ = n.listeners.resp.Close() // the error of Serve says more
		if err := server.Shutdown(ctx); err != nil {
			n.log.Warn("connections aborted", "listener", "resp", "error", err)
		}
	}
}

// served has the node fail if a server has ended without being told to.
func (n *Node) served(what string, err error) {
	if err != nil && n.ctx.Err() == nil && !errors.Is(err, http.ErrServerClosed) &&
		!errors.Is(err, grpc.ErrServerStopped) {
		n.fail(fmt.Errorf("%s server: %w", what, err))
	}
}
