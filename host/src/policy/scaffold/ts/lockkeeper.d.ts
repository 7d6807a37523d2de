// Generated from wit/policy.wit.

export namespace types {
  /** A name with a value. */
  interface Label {
    name: string;
    value: string;
  }
  /** The permits of a holder. */
  interface Permits {
    /** The number of permits that this holder takes. */
    count: number;
    /** The total number of permits of the key. It is 0 in a request: the policy sets it. */
    limit: number;
  }
  /** How a key is held: by one holder, by any number of readers, or by several holders that share `limit` permits. */
  type Mode = { tag: "exclusive" } | { tag: "shared" } | { tag: "permits"; val: Permits };
  /** The mechanism that implements a lock. */
  type Primitive = "lease" | "row" | "advisory" | "version" | "once" | "quorum";
  /** The part of a guarded HTTP request that the route shows to the policy. */
  interface HttpRequest {
    method: string;
    path: string;
    captures: Label[];
    query: Label[];
    headers: Label[];
    body: Uint8Array;
  }
  /** A request for a lock. */
  interface Request {
    /** The name of the resource to lock. */
    name: string;
    owner: string;
    mode: Mode;
    ttl?: number | undefined;
    wait?: number | undefined;
    labels: Label[];
    http?: HttpRequest | undefined;
    /** Random bits of this request, for policies that need a random choice. */
    seed: number;
  }
}

/** Turns a request into a plan. Every policy must export this hook. */
export namespace naming {
  type Request = types.Request;
  type Mode = types.Mode;
  type Primitive = types.Primitive;
  type Label = types.Label;
  /** How a request is locked. Limits of the proxy apply to every value. */
  interface LockPlan {
    /** The keys to hold, all or none. Each has 1 to 1,024 bytes. */
    keys: string[];
    primitive: Primitive;
    mode: Mode;
    ttl: number;
    /** The longest wait in the queue; 0 makes a single attempt. */
    wait: number;
    /** Lower ranks go first. Within a rank, waiters go in order of arrival. */
    rank: number;
    /** The group of this waiter, for `fairness`. */
    group: string;
    weight: number;
    /** Whether an owner that already holds the keys is granted them again. The grants are counted. */
    reentrant: boolean;
    /** The request is refused if the queue of a key already has this many waiters. */
    maxWaiters: number;
    /**
     * The keys stay taken for at least this long after the grant, even if they are released earlier. For the
     * primitive `once`: how long the outcome is kept; 0 stands for the proxy's default of one day.
     */
    lockAtLeast: number;
    /** How long the keys stay taken after a lease that ended without a release. */
    lockDelay: number;
    /** The longest time that the proxy keeps the lease of a held connection alive. */
    maxHold: number;
    labels: Label[];
  }
  /** The reason why a request gets no lock, which is shown to the client. */
  interface Refusal {
    reason: string;
  }
  interface Hook {
    /** Makes the plan of a request, or refuses the request. */
    plan(settings: Uint8Array, request: Request): LockPlan;
  }
}

/** Chooses the next waiter when a key becomes free and several requests wait for it. */
export namespace fairness {
  type Label = types.Label;
  type Mode = types.Mode;
  /** A waiting request. `waited` is the time since it began to wait. */
  interface Waiter {
    rank: number;
    group: string;
    weight: number;
    owner: string;
    mode: Mode;
    waited: number;
    labels: Label[];
  }
  /** The part of a group in the queue and in recent grants. */
  interface GroupShare {
    group: string;
    /** The number of the group's waiters in the whole queue, including those that are not in `waiters`. */
    waiting: number;
    /** How many of the key's recent grants went to the group. */
    recentGrants: number;
  }
  /** The queue of a key. */
  interface Queue {
    key: string;
    /** At most 64 waiters: the first ones of each group, in order of rank, then arrival. */
    waiters: Waiter[];
    groups: GroupShare[];
    seed: number;
  }
  interface Hook {
    /** Returns an index into `waiters`. */
    choose(settings: Uint8Array, queue: Queue): number;
  }
}

/** Decides what the first waiter does while another request holds the key. */
export namespace backoff {
  type Label = types.Label;
  /** A failed attempt to get a key. */
  interface Contention {
    key: string;
    /** The number of attempts that found the key held; 1 for the first. */
    attempt: number;
    waited: number;
    /** The time left until the request stops waiting. */
    waitLeft: number;
    /** The time left on the holder's lease, as far as it is known. */
    holderLeft: number;
    holder: string;
    waiters: number;
    /** The sleep before this attempt. */
    lastSleep: number;
    labels: Label[];
    seed: number;
  }
  /** What the waiter does next. */
  type Decision = { tag: "poll"; val: number } | { tag: "wake-up" } | { tag: "give-up"; val: string };
  interface Hook {
    /** Decides what the waiter does after a failed attempt. */
    contended(settings: Uint8Array, contention: Contention): Decision;
  }
}

/** Decides whether a lease that the proxy keeps alive is extended when it nears its end. */
export namespace renewal {
  type Label = types.Label;
  /** A lease that nears its end. `held` is the time since its grant. */
  interface Expiring {
    key: string;
    owner: string;
    ttl: number;
    renewals: number;
    held: number;
    maxHold: number;
    waiters: number;
    clientAlive: boolean;
    labels: Label[];
  }
  /** What the proxy does with the lease. */
  type Decision = { tag: "extend"; val: number } | { tag: "lapse" };
  interface Hook {
    /** Decides whether the lease is extended. */
    due(settings: Uint8Array, expiring: Expiring): Decision;
  }
}

/** Makes the HTTP answer to a guarded request that does not get its lock. */
export namespace response {
  type Request = types.Request;
  type Label = types.Label;
  /** The reason why the request does not get its lock. `position` counts from 1. */
  interface Contention {
    key: string;
    holder: string;
    position: number;
    waited: number;
    retryAfter: number;
  }
  /** The HTTP answer to the client. */
  interface Answer {
    status: number;
    retryAfter: number;
    headers: Label[];
    detail: string;
  }
  interface Hook {
    /** Makes the answer to a request that does not get its lock. */
    contended(settings: Uint8Array, request: Request, contention: Contention): Answer;
  }
}

/** Checks the policy's settings table of config.toml once, when the policy is loaded. */
export namespace settings {
  interface Hook {
    /**
     * Checks the settings, which `table` gives as a JSON object. The returned bytes are passed to every other hook.
     * An error refuses the load and is shown to the operator.
     */
    configure(table: string): Uint8Array;
  }
}

/** Lists what `plan` reads, so that the proxy can answer equal requests from memory. */
export namespace reads {
  /** A part of a request. `label` is the labels of one name; `labels` is all of them. */
  type Part = { tag: "name" } | { tag: "owner" } | { tag: "mode" } | { tag: "ttl" } | { tag: "wait" } | { tag: "label"; val: string } | { tag: "labels" } | { tag: "http" } | { tag: "seed" };
  interface Hook {
    /**
     * Lists the parts of a request that `plan` reads with these settings. The proxy asks once, when the policy is loaded.
     * From then on, `plan` gets only these parts: the others are empty, absent, `exclusive` or 0. The proxy may give
     * requests with the same parts the same plan without a call. A policy that does not export this hook gets all parts,
     * and is called for each request; so is a policy that lists `seed`.
     */
    planReads(settings: Uint8Array): Part[];
  }
}
